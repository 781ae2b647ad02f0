"""Run the experts of a Mixture-of-Experts layer through interchangeable backends."""
