"""Tell what a graph does: report, drawings, first elements, and the command `pipes-inspect`."""
