"""Lowers ATen to IR. Each module has a family of operators, registered in `entries`; `registry` imports all of them."""
