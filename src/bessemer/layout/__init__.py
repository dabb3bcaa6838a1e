"""What follows from a recipe's model and its [parallel] table: shapes, stages, schedules, FLOPs, bytes, communication."""
