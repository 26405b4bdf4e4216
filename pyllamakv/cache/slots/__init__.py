"""Keep conversations in slots: which one a prompt gets, and what makes way when it is full."""
