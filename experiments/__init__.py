"""Everything that makes a claim: training, replay, experiments, statistics, reports, benchmarks."""
