"""The closure: everything a converted checkpoint needs, copied beside its weights for `trust_remote_code`."""
