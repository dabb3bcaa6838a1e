"""`bessemer watch`: runs while they train, as a page that updates itself or as text, made from their folders alone."""
