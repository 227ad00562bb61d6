"""ATen → IR, a file per family of operators, which enter their lowerings in `entries`; `registry` has all of them."""
