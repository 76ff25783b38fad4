package dist

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// A release.json that says too little, too much or something else is refused
// with the place.
func TestValidate(t *testing.T) {
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	whole := func() map[string]any {
		return map[string]any{
			"schemaVersion": 1, "version": "1.2.3", "epoch": 1, "lockDigest": digest, "compression": "gzip", "compressor": "m@v1 level 6",
			"source": map[string]any{"repository": "https://example.test/images", "commit": strings.Repeat("a", 40), "loomcycle": "dir:x#unknown", "loomcyclePackage": "./x", "loomcycleLDFlags": "-s"},
			"images": []any{map[string]any{"name": "loomcycle", "indexDigest": digest, "platforms": []any{map[string]any{
				"platform": "linux/arm64", "digest": digest, "config": digest, "size": 2,
				"layers": []any{map[string]any{"group": "base", "digest": digest, "diffID": digest, "size": 1}},
			}}}},
		}
	}
	// at finds an object by its place, the first of a list.
	at := func(doc map[string]any, path ...string) map[string]any {
		for _, name := range path {
			switch v := doc[name].(type) {
			case map[string]any:
				doc = v
			case []any:
				doc = v[0].(map[string]any)
			}
		}
		return doc
	}
	set := func(value any, path ...string) func(map[string]any) {
		return func(doc map[string]any) { at(doc, path[:len(path)-1]...)[path[len(path)-1]] = value }
	}
	remove := func(path ...string) func(map[string]any) {
		return func(doc map[string]any) { delete(at(doc, path[:len(path)-1]...), path[len(path)-1]) }
	}
	variant := []string{"images", "platforms"}
	layer := []string{"images", "platforms", "layers"}
	in := func(path []string, name string) []string { return append(append([]string{}, path...), name) }
	tests := map[string]struct {
		change func(map[string]any)
		want   string
	}{
		"whole":                 {func(map[string]any) {}, ""},
		"no loomcycle":          {remove("source", "loomcycle"), ""},
		"a dirty commit":        {set(strings.Repeat("a", 40)+"-dirty", "source", "commit"), ""},
		"outside git":           {set("unknown", "source", "commit"), ""},
		"another schema":        {set(2, "schemaVersion"), "/schemaVersion"},
		"no version":            {set("", "version"), "/version"},
		"a short commit":        {set("abcdef0", "source", "commit"), "/source/commit"},
		"a field of the source": {set("x", "source", "branch"), "branch"},
		"no package":            {set("", "source", "loomcyclePackage"), "/source/loomcyclePackage"},
		"an epoch as text":      {set("1", "epoch"), "/epoch"},
		"an epoch before 1970":  {set(-1, "epoch"), "/epoch"},
		"another compression":   {set("xz", "compression"), "/compression"},
		"a short digest":        {set("sha256:0123", "lockDigest"), "/lockDigest"},
		"another algorithm":     {set("sha512:"+strings.Repeat("a", 128), "images", "indexDigest"), "/images/0/indexDigest"},
		"no images":             {set([]any{}, "images"), "/images"},
		"a name with a slash":   {set("a/b", "images", "name"), "/images/0/name"},
		"an image's field":      {set("x", "images", "tag"), "tag"},
		"no platforms":          {set([]any{}, "images", "platforms"), "/images/0/platforms"},
		"another platform":      {set("linux/riscv64", in(variant, "platform")...), "/images/0/platforms/0/platform"},
		"no size":               {set(0, in(variant, "size")...), "/images/0/platforms/0/size"},
		"no layers":             {set([]any{}, in(variant, "layers")...), "/images/0/platforms/0/layers"},
		"a layer's field":       {set("x", in(layer, "path")...), "path"},
		"a layer without group": {set("", in(layer, "group")...), "/images/0/platforms/0/layers/0/group"},
		"a large digest":        {set(strings.ToUpper(digest), in(layer, "diffID")...), "/layers/0/diffID"},
	}
	for _, name := range []string{"schemaVersion", "version", "source", "epoch", "lockDigest", "compression", "compressor", "images"} {
		tests["without "+name] = struct {
			change func(map[string]any)
			want   string
		}{remove(name), name}
	}
	for name, path := range map[string][]string{"repository": {"source"}, "commit": {"source"}, "name": {"images"}, "indexDigest": {"images"}, "platforms": {"images"},
		"platform": variant, "digest": variant, "config": variant, "size": variant, "layers": variant} {
		tests["without "+strings.Join(path, "/")+"/"+name] = struct {
			change func(map[string]any)
			want   string
		}{remove(in(path, name)...), name}
	}
	for _, name := range []string{"group", "digest", "diffID", "size"} {
		tests["a layer without "+name] = struct {
			change func(map[string]any)
			want   string
		}{remove(in(layer, name)...), name}
	}
	for name, tc := range tests {
		doc := whole()
		tc.change(doc)
		text, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		err = Validate(text)
		if (err == nil) != (tc.want == "") || err != nil && (!strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "release.json")) {
			t.Errorf("%s: the error is %v, not with %q", name, err, tc.want)
		}
	}
	for _, text := range []string{"", "[]", "{", `{"schemaVersion": 1} x`} {
		if Validate([]byte(text)) == nil {
			t.Errorf("%q is valid", text)
		}
	}
}

// The schema is the documentation: each property says what it is, and there is
// none that Go does not have, nor the other way round.
func TestSchemaDescribesEveryField(t *testing.T) {
	var s any
	if err := json.Unmarshal(schema, &s); err != nil {
		t.Fatal(err)
	}
	check := func(at string, node map[string]any) {
		if text, _ := node["description"].(string); len(text) < 10 || !strings.HasSuffix(text, ".") {
			t.Errorf("%s is described as %q", at, text)
		}
	}
	var fields func(at string, node map[string]any) []string
	fields = func(at string, node map[string]any) []string {
		if items, ok := node["items"].(map[string]any); ok {
			node = items
		}
		properties, _ := node["properties"].(map[string]any)
		var all []string
		for name, p := range properties {
			below := at + "/" + name
			check(below, p.(map[string]any))
			all = append(append(all, below), fields(below, p.(map[string]any))...)
		}
		return all
	}
	root := s.(map[string]any)
	check("the whole", root)
	got := fields("", root)
	var want []string
	var walk func(at string, of reflect.Type)
	walk = func(at string, of reflect.Type) {
		if of.Kind() == reflect.Slice {
			of = of.Elem()
		}
		if of.Kind() != reflect.Struct {
			return
		}
		for i := range of.NumField() {
			name, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
			want = append(want, at+"/"+name)
			walk(at+"/"+name, of.Field(i).Type)
		}
	}
	walk("", reflect.TypeFor[Release]())
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the schema has\n%s\nand Go\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
