"""Who calls, what they may do, and how much of it. Knows no engine and no request."""
