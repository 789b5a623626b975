"""`mpips bench`: one harness, one report, a case for each collective."""
