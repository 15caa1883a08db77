"""A run's or a benchmark's files become one page.

`read`, `bench`: files become facts. `outline`, `comparison`, `scaling`: facts become sections with figures, which `curves`, `steps`
and `timeline` draw. `page`: sections become HTML. `main`: the command.
"""
