"""Find upstream releases, fetch them, and keep them in one bare git store."""
