package bascule.payments;

import java.io.IOException;
import java.io.UncheckedIOException;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/** A resource that stops once, before or after a call that a test names. The test then kills a process, and lets the resource continue. */
final class PausingResource implements XAResource {
    private final String name;
    private final XAResource target;
    private final String point;
    private boolean stopped;

    PausingResource(String name, XAResource target, String point) {
        this.name = name;
        this.target = target;
        this.point = point;
    }

    String name() {
        return name;
    }

    private void pass(String call) {
        if (!stopped && point.equals(name + "." + call)) {
            stopped = true; // a transaction manager repeats a failed call
            Payments.say("at " + point);
            try {
                System.in.read();
            } catch (IOException broken) {
                throw new UncheckedIOException(broken);
            }
        }
    }

    @Override
    public void start(Xid xid, int flags) throws XAException {
        target.start(xid, flags);
    }

    @Override
    public void end(Xid xid, int flags) throws XAException {
        target.end(xid, flags);
        pass("end.after");
    }

    @Override
    public int prepare(Xid xid) throws XAException {
        pass("prepare.before");
        int vote = target.prepare(xid);
        pass("prepare.after");
        return vote;
    }

    @Override
    public void commit(Xid xid, boolean onePhase) throws XAException {
        pass("commit.before");
        target.commit(xid, onePhase);
        pass("commit.after");
    }

    @Override
    public void rollback(Xid xid) throws XAException {
        pass("rollback.before");
        target.rollback(xid);
        pass("rollback.after");
    }

    @Override
    public Xid[] recover(int flags) throws XAException {
        return target.recover(flags);
    }

    @Override
    public void forget(Xid xid) throws XAException {
        target.forget(xid);
    }

    @Override
    public int getTransactionTimeout() throws XAException {
        return target.getTransactionTimeout();
    }

    @Override
    public boolean setTransactionTimeout(int seconds) throws XAException {
        return target.setTransactionTimeout(seconds);
    }

    @Override
    public boolean isSameRM(XAResource other) throws XAException {
        return target.isSameRM(other instanceof PausingResource ? ((PausingResource) other).target : other);
    }
}
