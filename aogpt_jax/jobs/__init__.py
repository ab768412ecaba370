"""One file a job; nothing imports jobs but main."""
