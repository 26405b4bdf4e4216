"""The C interface, its generated cffi form and the sources of the shim."""
