"""Other tools' outputs as hetplan's own records."""
