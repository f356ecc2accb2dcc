"""Guests: modules, functions and models of other libraries under the strategies of this one."""
