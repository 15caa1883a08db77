"""What a run tells of itself: scalars, the breakdown of its steps, and where its files lie."""
