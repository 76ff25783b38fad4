# METADATA
# title: Release policy of the image family
# description: |
#   The input is one document for a whole release (policies/input.go). Every
#   `violations` rule has an id, a sentence (title), and a reason
#   (description); what breaks it and is not an exception is in `deny`.
package loomcycle.policy

deny contains v if {
	some v in violations
	not excepted(v)
}

# What an exception lets through is still reported.
allowed contains v if {
	some v in violations
	excepted(v)
}

# METADATA
# title: An exception has an owner and a reason and has not expired.
# description: An exception without an end is a rule that nobody decided on.
# custom:
#   id: exception-current
violations contains v if {
	some e in data.exceptions
	some problem in exception_problems(e)
	v := {"rule": "exception-current", "subject": e.rule, "message": sprintf("the exception for %s %s", [e.rule, problem])}
}

exception_problems(e) := {p |
	some field in ["rule", "subject", "owner", "reason", "expires"]
	object.get(e, field, "") == ""
	p := sprintf("has no %s", [field])
} | {p |
	not current(e)
	p := sprintf("expired on %s; fix what it excuses or decide anew", [object.get(e, "expires", "?")])
}

current(e) if time.parse_rfc3339_ns(sprintf("%sT00:00:00Z", [e.expires])) > time.parse_rfc3339_ns(input.now)

excepted(v) if {
	some e in data.exceptions
	v.rule != "exception-current"
	e.rule == v.rule
	glob.match(e.subject, null, v.subject)
	glob.match(object.get(e, "image", "*"), null, object.get(v, "image", ""))
	count(exception_problems(e)) == 0
}

# Every variant with its image, for rules to iterate over.
variants contains {"image": image, "variant": variant} if {
	some image in input.images
	some variant in image.variants
}

groups(variant) := {l.group | some l in variant.layers}

arch(variant) := trim_prefix(variant.platform, "linux/")

violation(rule, at, subject, message) := {
	"rule": rule, "image": at.image.name, "platform": at.variant.platform,
	"subject": subject, "message": message,
}
