"""Pages that show what a model does; each is one file that needs no network."""
