"""A name for `TORCH_LOGS`: each operator that runs on ATen, and why. torch takes names of modules; see `fuser.logs`."""
