package loomcycle.policy

# METADATA
# title: Every image is there for every platform, and no two platforms share a manifest, a configuration or a program.
# description: An index whose arm64 entry is really the amd64 image fails only on the user's machine.
# custom:
#   id: platforms-differ
violations contains v if {
	some image in input.images
	have := {p.platform | some p in image.variants}
	have != {p | some p in data.policy.platforms}
	v := {"rule": "platforms-differ", "image": image.name, "subject": image.name, "message": sprintf("%s is built for %v and not for %v", [image.name, have, data.policy.platforms])}
}

violations contains v if {
	some image in input.images
	some i, a in image.variants
	some j, b in image.variants
	i < j
	some what, same in {"manifest": a.digest == b.digest, "configuration": a.configDigest == b.configDigest, "program": shared_program(a, b)}
	same
	v := {"rule": "platforms-differ", "image": image.name, "subject": what, "message": sprintf("%s has the same %s for %s and %s", [image.name, what, a.platform, b.platform])}
}

default shared_program(_, _) := false

shared_program(a, b) if {
	some path, sum in a.facts.programs
	b.facts.programs[path] == sum
}

# METADATA
# title: A program is the same file, byte for byte, in every image of a platform.
# description: Swapping the distroless image for the toolbox must change the tools at hand and nothing else.
# custom:
#   id: program-identical
violations contains v if {
	some platform in data.policy.platforms
	some path in {p | some at in variants; some p, _ in at.variant.facts.programs}
	sums := {at.image.name: sum |
		some at in variants
		at.variant.platform == platform
		sum := at.variant.facts.programs[path]
	}
	count({s | some s in sums}) > 1
	v := {"rule": "program-identical", "platform": platform, "subject": path, "message": sprintf("/%s differs between images for %s: %v", [path, platform, sums])}
}

# METADATA
# title: Every image carries the programs that its contract names.
# description: Without its program an image passes most checks and does nothing.
# custom:
#   id: program-present
violations contains v if {
	some at in variants
	some name in at.image.contract.programs
	not at.variant.facts.programs[sprintf("usr/local/bin/%s", [name])]
	v := violation("program-present", at, name, sprintf("/usr/local/bin/%s is not there or no Go program", [name]))
}

# METADATA
# title: A group is one layer, the same in every image of a platform.
# description: Toolbox and session image share their toolchain layers; a node that has one downloads little for the other.
# custom:
#   id: layers-shared
violations contains v if {
	some platform in data.policy.platforms
	some group in {l.group | some at in variants; some l in at.variant.layers}
	not group in data.policy.own_layers
	digests := {l.digest |
		some at in variants
		at.variant.platform == platform
		some l in at.variant.layers
		l.group == group
	}
	count(digests) > 1
	v := {"rule": "layers-shared", "platform": platform, "subject": group, "message": sprintf("the group %s is %d different layers for %s", [group, count(digests), platform])}
}

# METADATA
# title: The release manifest says what the images are.
# description: Promotion and mirroring trust release.json; it must not differ from what the registry will serve.
# custom:
#   id: release-true
violations contains v if {
	some at in variants
	diff_ids := [l.diffID | some l in at.variant.layers]
	diff_ids != at.variant.config.rootfs.diff_ids
	v := violation("release-true", at, "layers", "the layers of release.json are not those of the configuration")
}

violations contains v if {
	some at in variants
	platform := sprintf("%s/%s", [at.variant.config.os, at.variant.config.architecture])
	platform != at.variant.platform
	v := violation("release-true", at, "platform", sprintf("the configuration is for %s", [platform]))
}

violations contains v if {
	some image in input.images
	indexed := {d | some d in image.index}
	indexed != {p.digest | some p in image.variants}
	v := {"rule": "release-true", "image": image.name, "subject": "index", "message": sprintf("the index of %s does not name exactly its variants", [image.name])}
}

# METADATA
# title: Every index and variant is signed, and every attestation is attached to it.
# description: A consumer's admission policy refuses what is not; better to know before the tag moves.
# custom:
#   id: signed
violations contains v if {
	some image in input.images
	some digest in array.concat([image.indexDigest], [p.digest | some p in image.variants])
	not verified(digest, "signature")
	v := {"rule": "signed", "image": image.name, "subject": digest, "message": sprintf("%s has no verified signature", [digest])}
}

violations contains v if {
	some image in input.images
	some kind in data.policy.index_attestations
	not verified(image.indexDigest, kind)
	v := {"rule": "signed", "image": image.name, "subject": kind, "message": sprintf("the index %s has no verified attestation of type %s", [image.indexDigest, kind])}
}

violations contains v if {
	some at in variants
	some kind in data.policy.attestations
	not verified(at.variant.digest, kind)
	v := violation("signed", at, kind, sprintf("%s has no verified attestation of type %s", [at.variant.digest, kind]))
}

# Before signing there is nothing to check: the document then says null.
verified(_, _) if is_null(input.signatures)

verified(digest, kind) if {
	some s in input.signatures
	s.digest == digest
	s.kind == kind
	s.verified
}
