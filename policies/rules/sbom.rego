package loomcycle.policy

# METADATA
# title: The SBOM is of this very manifest and complete.
# description: A file that no component claims is one that no scanner will ever report on.
# custom:
#   id: sbom-complete
violations contains v if {
	some at in variants
	at.variant.facts.digest != at.variant.digest
	v := violation("sbom-complete", at, "digest", sprintf("the SBOM describes %s; run `sbom` again", [at.variant.facts.digest]))
}

violations contains v if {
	some at in variants
	some u in at.variant.facts.unclaimed
	v := violation("sbom-complete", at, u.path, sprintf("/%s belongs to no component: %s", [u.path, u.why]))
}

violations contains v if {
	some at in variants
	some m in at.variant.facts.missing
	v := violation("sbom-complete", at, m, sprintf("%s is locked for this image and not in it", [m]))
}

# METADATA
# title: Nothing comes from a source that is not locked.
# description: What is not pinned by a digest can change between two builds of one commit.
# custom:
#   id: source-locked
violations contains v if {
	some at in variants
	some e in at.variant.facts.extra
	v := violation("source-locked", at, e, sprintf("%s is not in the lock", [e]))
}

violations contains v if {
	some at in variants
	some p in at.variant.facts.packages
	p.type in {"deb", "npm"}
	not p.within
	not object.get(p, "locked", "") in locked_digests
	v := violation("source-locked", at, p.name, sprintf("%s %s (%s) did not come from an archive of the lock", [p.name, p.version, p.type]))
}

violations contains v if {
	some at in variants
	some p in at.variant.facts.packages
	p.type == "go-module"
	p.within == data.policy.module
	p.name != "stdlib"
	not sprintf("%s %s %s", [p.name, p.version, object.get(p, "h1", "")]) in modules
	v := violation("source-locked", at, p.name, sprintf("the Go module %s %s is linked in with a content that go.sum does not have", [p.name, p.version]))
}

modules := {m | some m in input.modules}

locked_digests contains p.sha256 if some p in input.lock.debian[_]

locked_digests contains p.sha256 if some p in input.lock.npm[_]

locked_digests contains p.sha256 if some p in input.lock.go

# METADATA
# title: Every component has a licence of the allow-list.
# description: |
#   What Debian's main section holds is free by the Debian Free Software Guidelines, so those packages need a
#   licence, and only what this project refuses is refused; everything else needs one that the list names.
# custom:
#   id: licence-allowed
violations contains v if {
	some at in variants
	some p in at.variant.facts.packages
	not part_of_debian(p)
	count(p.licences) == 0
	v := violation("licence-allowed", at, p.name, sprintf("%s %s has no licence", [p.name, p.version]))
}

violations contains v if {
	some at in variants
	some p in at.variant.facts.packages
	not debian_main(p)
	some l in p.licences
	not licence_allowed(p, l)
	v := violation("licence-allowed", at, p.name, sprintf("%s %s is under %s, which is not in the allow-list", [p.name, p.version, l]))
}

violations contains v if {
	some at in variants
	some p in at.variant.facts.packages
	some l in p.licences
	every alternative in alternatives(p, l) {
		some licence in alternative
		some refused in data.policy.licences.refused
		glob.match(refused, null, licence)
	}
	v := violation("licence-allowed", at, p.name, sprintf("%s %s is under %s, which this project refuses", [p.name, p.version, l]))
}

part_of_debian(p) if p.withinType == "deb"

# The security archive has its pool one folder deeper.
debian_main(p) if regex.match(`^pool/(updates/)?main/`, main_paths[p.locked])

main_paths[p.sha256] := p.path if some p in input.lock.debian[_]

# A licence is allowed when one of its alternatives is, all parts of it.
licence_allowed(p, l) if {
	some alternative in alternatives(p, l)
	every licence in alternative {
		object.get(data.policy.licences.aliases, licence, licence) in data.policy.licences.allowed
	}
}

# What is no compound expression is the only alternative to itself.
alternatives(p, l) := object.get(object.get(p, "alternatives", {}), l, [[l]])
