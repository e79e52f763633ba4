"""`support_wrap_ops.yaml`, which users of msprobe edit: the list of APIs that a dump holds."""
