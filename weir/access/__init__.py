"""Who may do what: principals and how they prove themselves (`keys`), and what a policy lets them do (`policy`)."""
