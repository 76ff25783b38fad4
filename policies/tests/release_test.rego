# Each rule is broken once or more by a small change to a release that keeps
# them all.
package loomcycle.policy_test

import data.loomcycle.policy

commit := "1111111111111111111111111111111111111111"

runtime := "2222222222222222222222222222222222222222"

labels(title) := {key: value |
	some key in data.policy.labels
	value := object.get(
		{
			"org.opencontainers.image.revision": commit,
			"org.opencontainers.image.version": "1.2.3",
			"org.opencontainers.image.title": title,
		},
		key, "something",
	)
}

deb := {"group": "base", "name": "passwd", "version": "1:4.17", "arch": "amd64", "path": "pool/main/s/shadow/passwd.deb", "sha256": "sha256:d1"}

lock := {
	"debian": {"amd64": [deb, object.union(deb, {"group": "cross", "name": "gcc", "sha256": "sha256:c1"})], "arm64": [json.patch(deb, [{"op": "replace", "path": "/sha256", "value": "sha256:d2"}])]},
	"go": {"amd64": {"path": "go-amd64.zip", "sha256": "sha256:g1"}, "arm64": {"path": "go-arm64.zip", "sha256": "sha256:g2"}},
	"npm": {"amd64": [{"path": "npm.tgz", "sha256": "sha256:n1"}], "arm64": [{"path": "npm.tgz", "sha256": "sha256:n1"}]},
}

provenance(name, arch, digest, sums) := {
	"subject": [{"digest": {"sha256": digest}}],
	"predicate": {
		"buildDefinition": {
			"externalParameters": {
				"image": name, "platform": sprintf("linux/%s", [arch]), "version": "1.2.3",
				"source": {"uri": "git+https://git.example/images", "digest": commit},
			},
			"internalParameters": {"slsaBuildLevel": 2, "worker": "linux/amd64"},
			"resolvedDependencies": array.concat([{"digest": {"gitCommit": runtime}}], [{"digest": {"sha256": s}} | some s in sums]),
		},
		"runDetails": {"builder": {"id": "https://github.com/o/r/.github/workflows/release.yaml@refs/tags/v1.2.3"}},
	},
}

variant(name, title, user, arch, n) := {
	"platform": sprintf("linux/%s", [arch]),
	"digest": sprintf("sha256:%s-%s", [name, arch]),
	"configDigest": sprintf("sha256:%s-%s-config", [name, arch]),
	"size": 100,
	"layers": [
		{"group": "base", "digest": sprintf("sha256:base-%s", [arch]), "diffID": "sha256:b"},
		{"group": "go", "digest": sprintf("sha256:go-%s", [arch]), "diffID": "sha256:g"},
		{"group": "node", "digest": sprintf("sha256:node-%s", [arch]), "diffID": "sha256:n"},
		{"group": "files", "digest": sprintf("sha256:files-%s-%s", [name, arch]), "diffID": "sha256:f"},
	],
	"tools": ["base", "cross"],
	"annotations": labels(title),
	"config": {
		"os": "linux", "architecture": arch, "config": {"User": user, "Labels": labels(title)},
		"rootfs": {"diff_ids": ["sha256:b", "sha256:g", "sha256:n", "sha256:f"]},
	},
	"facts": {
		"digest": sprintf("sha256:%s-%s", [name, arch]),
		"packages": [
			{"name": "passwd", "version": "1:4.17", "type": "deb", "licences": ["GPL-2.0-or-later", "permissive"], "locked": sprintf("sha256:d%d", [n])},
			{"name": "npm", "version": "12", "type": "npm", "licences": ["Artistic-2.0"], "locked": "sha256:n1"},
			{"name": "bundled", "version": "1", "type": "npm", "licences": ["(MIT OR GPL-3.0-only)"], "alternatives": {"(MIT OR GPL-3.0-only)": [["MIT"], ["GPL-3.0-only"]]}, "within": "npm", "withinType": "npm"},
			{"name": "stdlib", "version": "1.27", "type": "go-module", "licences": [], "within": "passwd", "withinType": "deb"},
			{"name": "example.test/m", "version": "v1.0.0", "type": "go-module", "licences": ["MIT"], "within": data.policy.module, "withinType": "go-module", "h1": "h1:m"},
		],
		"special": [
			{"path": "tmp", "type": "directory", "mode": "1777", "uid": 0, "gid": 0, "sticky": true, "worldWritable": true},
			{"path": "usr/bin/passwd", "type": "file", "mode": "4755", "uid": 0, "gid": 0, "setuid": true, "component": "passwd"},
			{"path": "home/nonroot", "type": "directory", "mode": "775", "uid": 65532, "gid": 0},
		],
		"unclaimed": [], "missing": [], "extra": [],
		"secrets": [{"path": "usr/local/go/src/crypto/tls/testdata/key.pem", "kind": "private key", "component": "go-toolchain"}],
		"programs": {"usr/local/bin/loomcycle": sprintf("sha256:loomcycle-%s", [arch])},
	},
	"provenance": provenance(name, arch, sprintf("%s-%s", [name, arch]), {sprintf("d%d", [n]), sprintf("g%d", [n]), "n1", "d1", "c1", "g1"}),
}

image(name, user) := {
	"name": name, "indexDigest": sprintf("sha256:%s", [name]),
	"index": [sprintf("sha256:%s-amd64", [name]), sprintf("sha256:%s-arm64", [name])],
	"contract": {"title": name, "user": user, "distroless": false, "programs": ["loomcycle"], "budget": {"amd64": 100, "arm64": 100}},
	"variants": [variant(name, name, user, "amd64", 1), variant(name, name, user, "arm64", 2)],
}

good := {
	"now": "2030-01-02T03:04:05Z",
	"release": {"version": "1.2.3", "source": {"repository": "https://git.example/images", "commit": commit, "loomcycle": sprintf("git:https://git.example/loomcycle#%s", [runtime])}},
	"lock": lock,
	"modules": ["example.test/m v1.0.0 h1:m"],
	"images": [image("loomcycle-toolbox", "65532:65532"), image("loomcycle-builder", "0:0")],
	"signatures": null,
}

# broken gives the rules that the changed release breaks.
broken(patches) := {v.rule | some v in policy.deny with input as json.patch(good, patches) with data.exceptions as []}

set(path, value) := [{"op": "add", "path": path, "value": value}]

at(path) := sprintf("/images/0/variants/0%s", [path])

config(path) := at(sprintf("/config/config%s", [path]))

facts(path) := at(sprintf("/facts%s", [path]))

definition(path) := at(sprintf("/provenance/predicate/buildDefinition%s", [path]))

test_good_release if {
	result := policy.deny with input as good with data.exceptions as []
	result == set()
}

test_user_as_contract if broken(set(config("/User"), "1000:1000")) == {"user-as-contract"}

test_user_not_root if {
	every user in ["", "0", "root:root", "0:0"] {
		"user-not-root" in broken(set(config("/User"), user))
	}
}

test_no_config_at_all if broken([{"op": "remove", "path": config("")}]) == {"user-as-contract", "user-not-root", "labels-complete"}

test_labels_complete if {
	broken([{"op": "remove", "path": config("/Labels/org.opencontainers.image.source")}]) == {"labels-complete"}
	broken([{"op": "remove", "path": at("/annotations/org.opencontainers.image.source")}]) == {"labels-complete"}
	broken(set(config("/Labels/org.opencontainers.image.version"), "1.2.4")) == {"labels-complete"}
	broken([{"op": "remove", "path": config("/Labels")}]) == {"labels-complete"}
}

test_size_budget if {
	broken(set(at("/size"), 101)) == {"size-budget"}
	broken([{"op": "remove", "path": "/images/0/contract/budget/arm64"}]) == {"size-budget"}
}

special(f) := set(facts("/special/-"), object.union({"path": "opt/x", "type": "file", "mode": "755", "uid": 0, "gid": 0}, f))

test_setuid_allowed if {
	broken(special({"setuid": true})) == {"setuid-allowed"}
	broken(special({"setgid": true})) == {"setuid-allowed"}
	broken(special({"capability": true})) == {"setuid-allowed"}
	broken(special({"path": "usr/bin/passwd", "setuid": true, "component": "evil"})) == {"setuid-allowed"}
	broken(special({"type": "directory", "setgid": true})) == set()
	broken(set("/images/0/contract/distroless", true)) == {"setuid-allowed"}
}

test_world_writable if {
	broken(special({"worldWritable": true})) == {"world-writable"}
	broken(special({"path": "tmp", "type": "directory", "worldWritable": true})) == {"world-writable"}
	broken(special({"type": "directory", "worldWritable": true, "sticky": true})) == {"world-writable"}
}

test_owner_known if {
	broken(special({"type": "character-device"})) == {"owner-known"}
	broken(array.concat(set("/images/0/contract/distroless", true), special({"uid": 7}))) == {"owner-known", "setuid-allowed"}
	broken(special({"uid": 7})) == set()
}

test_no_secrets if {
	broken(set(facts("/secrets/-"), {"path": "etc/key", "kind": "private key"})) == {"no-secrets"}
	broken(set(facts("/secrets/-"), {"path": "usr/local/go/src/crypto/x", "kind": "AWS access key", "component": "go-toolchain"})) == {"no-secrets"}
}

test_sbom_complete if {
	"sbom-complete" in broken(set(facts("/digest"), "sha256:other"))
	broken(set(facts("/unclaimed/-"), {"path": "opt/x", "why": "nobody knows it"})) == {"sbom-complete"}
	broken(set(facts("/missing/-"), "libx 1 (amd64)")) == {"sbom-complete"}
}

test_source_locked if {
	broken(set(facts("/extra/-"), "libx 1 (amd64)")) == {"source-locked"}
	broken(set(facts("/packages/1/locked"), "sha256:other")) == {"source-locked"}
	"source-locked" in broken([{"op": "remove", "path": facts("/packages/0/locked")}])
	broken(set(facts("/packages/4/h1"), "h1:other")) == {"source-locked"}
	broken([{"op": "remove", "path": facts("/packages/4/h1")}]) == {"source-locked"}
	broken(array.concat(set(facts("/packages/4/h1"), "h1:other"), set(facts("/packages/4/within"), "git.example/loomcycle"))) == set()
}

compound(package_, licence, alternatives) := array.concat(
	set(facts(sprintf("/packages/%d/licences", [package_])), [licence]),
	set(facts(sprintf("/packages/%d/alternatives", [package_])), {licence: alternatives}),
)

test_licence_allowed if {
	broken(set(facts("/packages/0/licences"), [])) == {"licence-allowed"}
	broken(set(facts("/packages/1/licences"), [])) == {"licence-allowed"}
	broken(set(facts("/packages/1/licences"), ["Proprietary"])) == {"licence-allowed"}
	broken(compound(2, "MIT AND Proprietary", [["MIT", "Proprietary"]])) == {"licence-allowed"}
	broken(compound(2, "Proprietary AND (GPL-3.0-only OR MIT)", [["Proprietary", "GPL-3.0-only"], ["Proprietary", "MIT"]])) == {"licence-allowed"}
	broken(compound(2, "(MIT AND ISC) OR Proprietary", [["MIT", "ISC"], ["Proprietary"]])) == set()
	broken(compound(0, "MIT AND AGPL-3.0-only", [["MIT", "AGPL-3.0-only"]])) == {"licence-allowed"}
	broken(compound(0, "MIT OR AGPL-3.0-only", [["MIT"], ["AGPL-3.0-only"]])) == set()
	broken(set(facts("/packages/0/licences"), ["AGPL-3.0-only"])) == {"licence-allowed"}
	broken(set("/lock/debian/amd64/0/path", "pool/updates/main/x.deb")) == set()
	broken(set(facts("/packages/1/licences"), ["Apache 2.0"])) == set()
	broken(set("/lock/debian/amd64/0/path", "pool/non-free/x.deb")) == {"licence-allowed"}
}

test_provenance_of_variant if {
	broken(set(at("/provenance/subject/0/digest/sha256"), "other")) == {"provenance-of-variant"}
	every key in ["image", "platform", "version"] {
		broken(set(definition(sprintf("/externalParameters/%s", [key])), "other")) == {"provenance-of-variant"}
	}
	broken(set(definition("/externalParameters/source/digest"), "other")) == {"provenance-of-variant"}
}

# without gives what is wrong when a variant, the second of the first image, has no such source.
without(kind, sum, patches) := {v.subject |
	all := good.images[0].variants[1].provenance.predicate.buildDefinition.resolvedDependencies
	patch := {"op": "add", "path": "/images/0/variants/1/provenance/predicate/buildDefinition/resolvedDependencies", "value": [d | some d in all; object.get(d.digest, kind, "another") != sum]}
	some v in policy.deny with input as json.patch(good, array.concat([patch], patches)) with data.exceptions as []
	v.rule == "sources-in-provenance"
}

test_sources_in_provenance if {
	every sum, subject in {"d2": "passwd", "d1": "passwd", "c1": "gcc", "g1": "compiler", "g2": "go-arm64.zip", "n1": "npm.tgz"} {
		without("sha256", sum, []) == {subject}
	}
	without("gitCommit", runtime, []) == {"loomcycle"}
}

# What needs no compiler: a runtime that came as a binary, where nothing else is compiled.
test_compiler_in_provenance if {
	prebuilt := set("/release/source/loomcycle", "bin:loomcycle")
	without("sha256", "g1", prebuilt) == set()
	without("sha256", "g1", array.concat(prebuilt, set("/images/0/contract/programs", ["session-agent"]))) == {"compiler"}
	without("sha256", "g1", array.concat(prebuilt, set("/images/0/variants/1/layers/2/group", "gocache"))) == {"compiler"}
	without("gitCommit", runtime, set("/images/0/contract/programs", ["loomcycle-builder"])) == set()
	"compiler" in {v.subject | some v in policy.deny with input as json.patch(good, [{"op": "remove", "path": definition("/internalParameters/worker")}]) with data.exceptions as []}
}

test_source_is_commit if {
	every version in ["1.2.3", "1.3.0-rc.1", "1.3.0-preview.1", "1.3.0-20300101"] {
		"source-is-commit" in broken(array.concat(set("/release/source/commit", concat("", [commit, "-dirty"])), set("/release/version", version)))
	}
}

at_source(label) := set("/release/source/loomcycle", label)

test_runtime_is_commit if {
	every label in ["git:https://git.example/loomcycle", "dir:loomcycle#unknown", sprintf("dir:loomcycle#%s-dirty", [runtime])] {
		"source-is-commit" in broken(at_source(label))
	}
	every label in ["", "bin:folder", sprintf("dir:loomcycle#%s", [runtime])] {
		broken(at_source(label)) == set()
	}
	not "source-is-commit" in broken(array.concat(at_source("dir:loomcycle#unknown"), set("/release/version", "0.0.0-gabc-dirty")))
}

test_source_is_commit_only_for_releases if {
	every version in ["0.0.0-gabc-dirty", "1.2.3-4-gabcdef0", "1.2.3-dirty"] {
		not "source-is-commit" in broken(array.concat(set("/release/source/commit", "unknown"), set("/release/version", version)))
	}
}

test_level_true if {
	broken(set(definition("/internalParameters/slsaBuildLevel"), 3)) == {"level-true"}
	broken(set(at("/provenance/predicate/runDetails/builder/id"), "https://git.example/images/builders/local")) == {"level-true"}
}

test_platforms_differ if {
	"platforms-differ" in broken([{"op": "remove", "path": "/images/0/variants/1"}])
	"platforms-differ" in broken(set(at("/digest"), "sha256:loomcycle-toolbox-arm64"))
	broken(set(at("/configDigest"), "sha256:loomcycle-toolbox-arm64-config")) == {"platforms-differ"}
	"platforms-differ" in broken(set(facts("/programs/usr~1local~1bin~1loomcycle"), "sha256:loomcycle-arm64"))
}

test_program_identical if broken(set(facts("/programs/usr~1local~1bin~1loomcycle"), "sha256:other")) == {"program-identical"}

test_program_present if broken(set("/images/0/contract/programs/-", "other")) == {"program-present"}

test_layers_shared if {
	broken(set(at("/layers/1/digest"), "sha256:other")) == {"layers-shared"}
	broken(set(at("/layers/3/digest"), "sha256:other")) == set()
}

test_release_true if {
	broken(set(at("/layers/1/diffID"), "sha256:other")) == {"release-true"}
	broken(set(at("/config/architecture"), "arm64")) == {"release-true"}
	broken([{"op": "remove", "path": "/images/0/index/1"}]) == {"release-true"}
}

signatures := [{"digest": d, "kind": kind, "by": "key", "verified": true} |
	some i in good.images
	some at in array.concat([{"digest": i.indexDigest, "kinds": data.policy.index_attestations}], [{"digest": v.digest, "kinds": data.policy.attestations} | some v in i.variants])
	d := at.digest
	some kind in array.concat(["signature"], at.kinds)
]

test_signed if {
	broken(set("/signatures", signatures)) == set()
	broken(set("/signatures", [])) == {"signed"}
	broken(set("/signatures", [s | some s in signatures; s.kind != "signature"])) == {"signed"}
	broken(set("/signatures", [s | some s in signatures; s.kind != "https://spdx.dev/Document"])) == {"signed"}
	every kind in data.policy.index_attestations {
		broken(set("/signatures", [s | some s in signatures; [s.digest, s.kind] != ["sha256:loomcycle-builder", kind]])) == {"signed"}
	}
	broken(set("/signatures", [object.union(s, {"verified": false}) | some s in signatures])) == {"signed"}
}

exception := {"rule": "setuid-allowed", "subject": "opt/*", "image": "loomcycle-toolbox", "owner": "someone", "reason": "a test", "expires": "2030-02-01"}

excepted(e) := {v.rule | some v in policy.deny with input as json.patch(good, special({"setuid": true})) with data.exceptions as [e]}

test_exception_current if {
	excepted(exception) == set()
	excepted(object.union(exception, {"expires": "2030-01-02"})) == {"setuid-allowed", "exception-current"}
	every field in ["owner", "reason", "expires", "subject"] {
		excepted(object.remove(exception, [field])) == {"setuid-allowed", "exception-current"}
	}
	excepted(object.union(exception, {"subject": "usr/*"})) == {"setuid-allowed"}
	excepted(object.union(exception, {"image": "loomcycle"})) == {"setuid-allowed"}
	excepted(object.union(exception, {"rule": "no-secrets"})) == {"setuid-allowed"}
}

test_exception_is_reported if {
	result := policy.allowed with input as json.patch(good, special({"setuid": true})) with data.exceptions as [exception]
	{v.subject | some v in result} == {"opt/x"}
}

# An exception can't excuse itself.
test_exception_for_exceptions if {
	e := object.union(exception, {"rule": "exception-current", "subject": "*"})
	result := policy.deny with input as good with data.exceptions as [e, object.union(exception, {"owner": ""})]
	{v.rule | some v in result} == {"exception-current"}
}
