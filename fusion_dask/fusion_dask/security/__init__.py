"""Who may join and what for: authority, tokens, identities, enrolment, and the guard on Dask."""
