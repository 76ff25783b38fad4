package loomcycle.policy

uid(user) := split(user, ":")[0]

root(user) if uid(user) in {"", "0", "root"}

# METADATA
# title: The image runs as the user that its contract names, by number.
# description: Kubernetes can check runAsNonRoot only for a numeric user, and volumes are owned by that number.
# custom:
#   id: user-as-contract
violations contains v if {
	some at in variants
	user := object.get(at.variant.config, ["config", "User"], "")
	user != at.image.contract.user
	v := violation("user-as-contract", at, user, sprintf("the user is %q, and the contract says %q", [user, at.image.contract.user]))
}

# METADATA
# title: No image runs as root but those that own a container engine.
# description: A process that is root in a container is one kernel bug away from root on the host.
# custom:
#   id: user-not-root
violations contains v if {
	some at in variants
	user := object.get(at.variant.config, ["config", "User"], "")
	root(user)
	not at.image.name in data.policy.root_images
	v := violation("user-not-root", at, user, "the image runs as root; set config.user in its image.yaml")
}

# METADATA
# title: Labels and annotations are complete and true.
# description: Registries, scanners and operators find source, version and licence of an image by them (OCI image-spec, annotations.md).
# custom:
#   id: labels-complete
violations contains v if {
	some at in variants
	some place, have in {"label": object.get(at.variant.config, ["config", "Labels"], {}), "annotation": at.variant.annotations}
	some key in data.policy.labels
	object.get(have, key, "") == ""
	v := violation("labels-complete", at, key, sprintf("the %s %s is missing", [place, key]))
}

violations contains v if {
	some at in variants
	labels := object.get(at.variant.config, ["config", "Labels"], {})
	some key, want in {
		"org.opencontainers.image.revision": input.release.source.commit,
		"org.opencontainers.image.version": input.release.version,
		"org.opencontainers.image.title": at.image.contract.title,
	}
	got := object.get(labels, key, "")
	got != ""
	got != want
	v := violation("labels-complete", at, key, sprintf("the label %s is %q, and the release says %q", [key, got, want]))
}

# METADATA
# title: A variant is no larger than its budget.
# description: Size is start-up time on every node; it grows unnoticed unless a number says stop.
# custom:
#   id: size-budget
violations contains v if {
	some at in variants
	budget := object.get(at.image.contract.budget, arch(at.variant), 0)
	at.variant.size > budget
	v := violation("size-budget", at, "layers", sprintf("the layers are %d bytes and the budget in image.yaml is %d", [at.variant.size, budget]))
}
