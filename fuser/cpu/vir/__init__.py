"""The vector IR: frozen nodes between a kernel plan and C++, with builder, verifier, printer and interpreter."""
