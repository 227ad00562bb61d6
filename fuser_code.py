"""A name for `TORCH_LOGS`: the source of each kernel. torch takes names of modules; see `fuser.logs`."""
