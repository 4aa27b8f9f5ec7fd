"""What leaves: results, their statement, and draws that know the noise."""
