package loomcycle.policy

build(variant) := variant.provenance.predicate.buildDefinition

dependencies(variant) := {sum |
	some d in build(variant).resolvedDependencies
	sum := sprintf("sha256:%s", [d.digest.sha256])
}

# METADATA
# title: The provenance is of this very manifest, from the source and for the platform that the release names.
# description: A statement about another image proves nothing about this one.
# custom:
#   id: provenance-of-variant
violations contains v if {
	some at in variants
	subjects := {sprintf("sha256:%s", [s.digest.sha256]) | some s in at.variant.provenance.subject}
	not at.variant.digest in subjects
	v := violation("provenance-of-variant", at, "subject", sprintf("the provenance is about %v", [subjects]))
}

violations contains v if {
	some at in variants
	some key, want in {
		"image": at.image.name, "platform": at.variant.platform, "version": input.release.version,
		"source": {"uri": sprintf("git+%s", [input.release.source.repository]), "digest": input.release.source.commit},
	}
	got := object.get(object.get(build(at.variant), "externalParameters", {}), key, "nothing")
	got != want
	v := violation("provenance-of-variant", at, key, sprintf("the provenance says %v for %s, and the release %v", [got, key, want]))
}

# METADATA
# title: Every locked source of a variant is in its provenance with its digest.
# description: Whoever rebuilds the image, or looks for a bad upstream archive, starts from this list.
# custom:
#   id: sources-in-provenance
violations contains v if {
	some at in variants
	have := dependencies(at.variant)
	some p in input.lock.debian[arch(at.variant)]
	p.group in groups(at.variant)
	not p.sha256 in have
	v := violation("sources-in-provenance", at, p.name, sprintf("%s %s of group %s is not in the provenance", [p.name, p.version, p.group]))
}

violations contains v if {
	some at in variants
	have := dependencies(at.variant)
	some group, sources in {"go": [input.lock.go[arch(at.variant)]], "node": input.lock.npm[arch(at.variant)]}
	group in groups(at.variant)
	some p in sources
	not p.sha256 in have
	v := violation("sources-in-provenance", at, p.path, sprintf("%s of group %s is not in the provenance", [p.path, group]))
}

violations contains v if {
	some at in variants
	have := dependencies(at.variant)
	some p in input.lock.debian[worker(at.variant)]
	p.group in at.variant.tools
	not p.sha256 in have
	v := violation("sources-in-provenance", at, p.name, sprintf("%s %s of group %s, which made a layer, is not in the provenance", [p.name, p.version, p.group]))
}

violations contains v if {
	some at in variants
	compiled(at)
	compilers := {s | s := input.lock.go[worker(at.variant)].sha256}
	count(compilers & dependencies(at.variant)) == 0
	v := violation("sources-in-provenance", at, "compiler", sprintf("the Go toolchain of the worker %s, which compiled it, is not in the provenance", [worker(at.variant)]))
}

violations contains v if {
	some at in variants
	"loomcycle" in at.image.contract.programs
	commit := trim_suffix(split(loomcycle, "#")[1], "-dirty")
	not commit in {d.digest.gitCommit | some d in build(at.variant).resolvedDependencies}
	v := violation("sources-in-provenance", at, "loomcycle", sprintf("the commit %s of the runtime is not in the provenance", [commit]))
}

loomcycle := object.get(input.release.source, "loomcycle", "")

# The architecture of the node that built, as the provenance has it.
worker(variant) := trim_prefix(object.get(build(variant), ["internalParameters", "worker"], "nothing"), "linux/")

# All programs are compiled but a runtime that came as a binary.
compiled(at) if "gocache" in groups(at.variant)

compiled(at) if {
	some program in at.image.contract.programs
	program != "loomcycle"
}

compiled(at) if {
	"loomcycle" in at.image.contract.programs
	not startswith(loomcycle, "bin:")
}

# METADATA
# title: A released version is built from a commit, not from a changed work tree.
# description: A build that nobody can check out again can't be reproduced.
# custom:
#   id: source-is-commit
violations contains v if {
	regex.match(data.policy.release_version, input.release.version)
	not regex.match(data.policy.development_version, input.release.version)
	not regex.match(`^[0-9a-f]{40}$`, input.release.source.commit)
	v := {"rule": "source-is-commit", "subject": input.release.version, "message": sprintf("version %s was built from commit %s", [input.release.version, input.release.source.commit])}
}

violations contains v if {
	regex.match(data.policy.release_version, input.release.version)
	not regex.match(data.policy.development_version, input.release.version)
	not regex.match(`^$|^bin:|#[0-9a-f]{40}$`, loomcycle)
	v := {"rule": "source-is-commit", "subject": loomcycle, "message": sprintf("version %s has a runtime that was built from %s", [input.release.version, loomcycle])}
}

# METADATA
# title: A level is claimed only as far as the builder reaches it.
# description: SLSA's build level 2 needs a hosted builder that signs; the provenance of any other machine is level 1.
# custom:
#   id: level-true
violations contains v if {
	some at in variants
	level := build(at.variant).internalParameters.slsaBuildLevel
	level > highest(at.variant.provenance.predicate.runDetails.builder.id)
	v := violation("level-true", at, "slsaBuildLevel", sprintf("level %v is claimed for %s", [level, at.variant.provenance.predicate.runDetails.builder.id]))
}

highest(id) := 2 if regex.match(data.policy.hosted_builder, id)

else := 1
