"""Commands of a user look at data and runs through the rooms; no room looks back."""
