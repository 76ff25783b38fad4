package dist

import "testing"

func TestNoImage(t *testing.T) {
	r := &Release{Images: []Image{{Name: "one"}, {Name: "two"}}}
	if img, err := r.Image("two"); err != nil || img.Name != "two" {
		t.Fatal(img, err)
	}
	if _, err := r.Image("three"); err == nil || err.Error() != `this build has no image called "three"; it has one, two` {
		t.Fatal(err)
	}
}
