"""HTML reports about runs and benchmarks.

`read` and `bench` parse files. `outline` and `comparison` build the report's sections, with figures
from `curves`, `steps`, `timeline` and `scaling`. `page` renders the sections with the templates in
`templates/`. `main` is the command.
"""
