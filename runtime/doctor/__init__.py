"""`outrider doctor`: looks at an installation with the settings of a server, and says what to do about its findings."""
