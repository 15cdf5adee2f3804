"""Shows results to a person: tables and bars in the terminal, the same as HTML, and JSON for programs."""
