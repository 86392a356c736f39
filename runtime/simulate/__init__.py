"""`outrider simulate`: the planner, admission and scheduler at work on ranks that only take virtual time."""
