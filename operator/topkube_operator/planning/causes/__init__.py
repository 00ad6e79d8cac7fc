"""The causes of failures: what failed, what the failure policy makes of it, and which nodes new pods avoid."""
