"""A name for `TORCH_LOGS`: seconds of compilations, and contests. torch takes names of modules; see `fuser.logs`."""
