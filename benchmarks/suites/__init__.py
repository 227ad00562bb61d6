"""One file per suite: `run(options) -> Report`, and where it needs fresh processes, `child(params) -> dict`."""
