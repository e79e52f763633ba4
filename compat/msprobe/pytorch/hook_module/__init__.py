"""`support_wrap_ops.yaml`, the list of APIs that users of msprobe edit; here it is a filter, since nothing needs to be listed."""
