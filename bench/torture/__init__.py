"""Random harm to a captured program: signals, exceptions, disks that fail, folders that vanish."""
