"""What policies learn from ended requests: output lengths, and the latencies of FCFS."""
