"""The benchmark: workloads, load over gRPC, figures, and reports of them. Knows no command line."""
