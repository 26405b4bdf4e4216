"""Draw caches: in the terminal, as SVG and PNG, and in the HTML page of a matrix."""
