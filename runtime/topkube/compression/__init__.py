"""What is sent: selection and error feedback."""
