"""From a declaration to launches: choosing an implementation, plans, the tape, registration, the hot path."""
