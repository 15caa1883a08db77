"""What a run tells of itself: scalars, the anatomy of its steps, and where its files lie."""
