package smoke

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"go.yaml.in/yaml/v3"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"github.com/loomcycle/loomcycle-images/smoke/plan"
)

const probePath = plan.Probe

//go:embed case.schema.json
var schemaText []byte

// Load reads cases/*.yaml of the smoke folder. An error names the file, the
// line, the case and the field.
func Load(dir fs.FS) (*Suite, error) {
	schema, err := compileSchema()
	if err != nil {
		return nil, err
	}
	files, err := fs.Glob(dir, "cases/*.yaml")
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, errors.New("there is no case: cases/*.yaml matches no file")
	}
	s := &Suite{Profiles: map[string]Profile{}}
	var errs []error
	for _, file := range files {
		text, err := fs.ReadFile(dir, file)
		if err != nil {
			return nil, err
		}
		errs = append(errs, s.add(schema, file, text))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	fixtures, err := fs.Sub(dir, "fixtures")
	if err != nil {
		return nil, err
	}
	return s, s.check(fixtures)
}

func compileSchema() (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schemaText))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	c.RegisterFormat(&jsonschema.Format{Name: "go-regexp", Validate: func(v any) error {
		text, _ := v.(string)
		_, err := pattern(text)
		return err
	}})
	if err := c.AddResource("case.schema.json", doc); err != nil {
		return nil, err
	}
	return c.Compile("case.schema.json")
}

func (s *Suite) add(schema *jsonschema.Schema, file string, text []byte) error {
	var node yaml.Node
	if err := yaml.Unmarshal(text, &node); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	var plain any
	if err := node.Decode(&plain); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if err := schema.Validate(plain); err != nil {
		return explain(file, &node, err)
	}
	var content struct {
		Profiles map[string]Profile `yaml:"profiles"`
		Cases    []Case             `yaml:"cases"`
	}
	if err := node.Decode(&content); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for name, p := range content.Profiles {
		if _, ok := s.Profiles[name]; ok {
			return fmt.Errorf("%s: the profile %q is defined twice", file, name)
		}
		s.Profiles[name] = p
	}
	for _, c := range content.Cases {
		c.File = file
		s.Cases = append(s.Cases, c)
	}
	return nil
}

// explain makes sentences of a schema violation: one a field, with its line.
func explain(file string, root *yaml.Node, err error) error {
	var v *jsonschema.ValidationError
	if !errors.As(err, &v) {
		return fmt.Errorf("%s: %w", file, err)
	}
	printer := message.NewPrinter(language.English)
	var errs []error
	var walk func(v *jsonschema.ValidationError)
	walk = func(v *jsonschema.ValidationError) {
		line, where := locate(root, v.InstanceLocation)
		switch k := v.ErrorKind.(type) {
		case *kind.OneOf:
			errs = append(errs, fmt.Errorf("%s:%d: %s: give one of %s", file, line, where, strings.Join(alternatives(v.SchemaURL), ", ")))
			return
		case *kind.Format:
			errs = append(errs, fmt.Errorf("%s:%d: %s: %w", file, line, where, k.Err))
			return
		}
		if len(v.Causes) == 0 {
			errs = append(errs, fmt.Errorf("%s:%d: %s: %s", file, line, where, v.ErrorKind.LocalizedString(printer)))
		}
		for _, c := range v.Causes {
			walk(c)
		}
	}
	walk(v)
	return errors.Join(errs...)
}

// alternatives are the fields of which a schema's oneOf requires one.
func alternatives(schema string) (fields []string) {
	_, at, _ := strings.Cut(schema, "#/")
	var node any
	_ = json.Unmarshal(schemaText, &node) // it compiled
	for _, key := range append(strings.Split(at, "/"), "oneOf") {
		object, _ := node.(map[string]any)
		node = object[key]
	}
	list, _ := node.([]any)
	for _, one := range list {
		object, _ := one.(map[string]any)
		names, _ := object["required"].([]any)
		fields = append(fields, fmt.Sprint(names...))
	}
	return fields
}

// locate follows a JSON pointer through the YAML, and names cases by their
// name rather than by their place.
func locate(n *yaml.Node, pointer []string) (line int, where string) {
	if n.Kind == yaml.DocumentNode && len(n.Content) > 0 {
		n = n.Content[0]
	}
	var names []string
	for _, key := range pointer {
		next := child(n, key)
		if next == nil {
			break
		}
		if n = next; n.Kind == yaml.MappingNode && len(names) > 0 && names[len(names)-1] == "cases" {
			names[len(names)-1] = "case"
			if name := child(n, "name"); name != nil {
				key = name.Value
			}
		}
		names = append(names, key)
	}
	if len(names) == 0 {
		return n.Line, "the file"
	}
	return n.Line, strings.Join(names, " ")
}

func child(n *yaml.Node, key string) *yaml.Node {
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				return n.Content[i+1]
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(key); err == nil && i < len(n.Content) {
			return n.Content[i]
		}
	}
	return nil
}
