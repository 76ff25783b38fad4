package loomcycle.policy

# METADATA
# title: No set-id or capability-carrying file outside the allow-list, and none at all in a distroless image.
# description: Such a file gives its caller rights that the container's user does not have.
# custom:
#   id: setuid-allowed
violations contains v if {
	some at in variants
	some f in at.variant.facts.special
	f.type == "file"
	some how in ["setuid", "setgid", "capability"]
	object.get(f, how, false)
	not setuid_allowed(at.image, f)
	v := violation("setuid-allowed", at, f.path, sprintf("/%s is %s (mode %s, of %s)", [f.path, how, f.mode, object.get(f, "component", "nothing")]))
}

setuid_allowed(image, f) if {
	not image.contract.distroless
	f.component == data.policy.setuid[f.path]
}

# METADATA
# title: Nothing is writable for everyone but the temporary folders, with the sticky bit.
# description: A world-writable file lets any process in the container plant code for another.
# custom:
#   id: world-writable
violations contains v if {
	some at in variants
	some f in at.variant.facts.special
	object.get(f, "worldWritable", false)
	not temporary(f)
	v := violation("world-writable", at, f.path, sprintf("/%s is writable for everyone (%s, mode %s)", [f.path, f.type, f.mode]))
}

temporary(f) if {
	f.type == "directory"
	object.get(f, "sticky", false)
	f.path in data.policy.temporary
}

# METADATA
# title: A distroless image has no file of an owner other than root and its user, and no image has device files.
# description: An owner without an account is a file that nobody decided to give to anyone; devices come from the engine.
# custom:
#   id: owner-known
violations contains v if {
	some at in variants
	at.image.contract.distroless
	some f in at.variant.facts.special
	not sprintf("%d", [f.uid]) in {"0", uid(at.image.contract.user)}
	v := violation("owner-known", at, f.path, sprintf("/%s is owned by %d:%d", [f.path, f.uid, f.gid]))
}

violations contains v if {
	some at in variants
	some f in at.variant.facts.special
	endswith(f.type, "-device")
	v := violation("owner-known", at, f.path, sprintf("/%s is a %s", [f.path, f.type]))
}

# METADATA
# title: Nothing in an image looks like a secret.
# description: A layer is public for ever once it is pushed; what was in it must be revoked.
# custom:
#   id: no-secrets
violations contains v if {
	some at in variants
	some s in at.variant.facts.secrets
	not published(s)
	v := violation("no-secrets", at, s.path, sprintf("%s looks like a %s", [s.path, s.kind]))
}

published(s) if {
	some p in data.policy.published
	p.component == object.get(s, "component", "")
	p.kind == s.kind
	glob.match(p.path, null, s.path)
}
