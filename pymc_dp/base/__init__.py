"""What everything stands on: versions of PyMC, compilation, threads, checks, linear algebra."""
