"""`weir key` and `weir access`: the keys of principals, and what the policy lets them do."""
