// Fault injection: the n-th allocation that a test asks about fails.
#pragma once

// what fails, and how often it was asked; the program that injects faults defines the operators in failing.h
struct fault_counts {
    long at     = -1; // which one fails, counted from 0; -1: none
    long n_seen = 0;  // since arm()
    int  exempt = 0;  // more than 0: an allocation of the test itself
    bool armed  = false;
};

inline fault_counts & faults() {
    static fault_counts counts;
    return counts;
}

inline void arm(long at) {
    auto & f = faults();
    f.at     = at;
    f.n_seen = 0;
    f.armed  = true;
}

// returns true if the fault was injected
inline bool disarm() {
    faults().armed = false;
    return faults().at >= 0 && faults().n_seen > faults().at;
}

// counts an allocation; true if it has to fail
inline bool fault() {
    auto & f = faults();
    return f.armed && f.exempt == 0 && f.n_seen++ == f.at;
}

// while it lives, nothing is counted and nothing fails
struct exempt {
    exempt() { faults().exempt++; }
    ~exempt() { faults().exempt--; }
};
