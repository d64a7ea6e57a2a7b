"""A job in virtual time: the real core, journal, daemon, performers and monitor on fakes."""
